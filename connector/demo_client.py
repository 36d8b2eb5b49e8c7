"""What a client of an OpenAI-compatible server sees: answers, streamed, with the time to the first token."""

import http.client
import json
import re
import time


class Client:
    def __init__(self, port, timeout_s=180):
        self._port = port
        self._timeout_s = timeout_s

    def _connect(self):
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)

    def healthy(self):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask(self, prompt, max_tokens=32, **fields):
        """Streams the greedy answer to a user's message. Returns ttft_s, text, cached_tokens and,
        where they are asked for, logprobs."""
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        connection = self._connect()
        try:
            started = time.monotonic()
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {response.read(1000).decode(errors='replace')}")
            ttft_s, text, usage, logprobs = None, "", {}, []
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    logprobs += (choice.get("logprobs") or {}).get("content") or ()
                    if (piece or logprobs) and ttft_s is None:
                        ttft_s = time.monotonic() - started
                    text += piece
        finally:
            connection.close()
        if ttft_s is None:
            raise RuntimeError("the answer is empty")
        details = usage.get("prompt_tokens_details") or {}
        return {
            "ttft_s": ttft_s,
            "text": text,
            "prompt_tokens": usage.get("prompt_tokens", 0),
            "cached_tokens": details.get("cached_tokens") or 0,
            "logprobs": logprobs,
        }

    def counters(self):
        """cachegen's counters in /metrics: name, summed over levels, and name_l0 ... name_l3."""
        connection = self._connect()
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        totals = {}
        line = r"^vllm:cachegen_(\w+?)(?:_total)?\{([^}]*)\} (\S+)$"
        for name, labels, value in re.findall(line, text, re.M):
            if name.endswith("_created"):
                continue
            level = re.search(r'\blevel="L(\d)"', labels)
            for key in [name] + ([f"{name}_l{level[1]}"] if level else []):
                totals[key] = totals.get(key, 0.0) + float(value)
        return totals

    def counters_since(self, before, until, timeout_s=10):
        """The increments of the counters, once until(increments) holds: they arrive with an engine step's output."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.counters()
            increments = {name: value - before.get(name, 0) for name, value in now.items()}
            if until(increments) or time.monotonic() > deadline:
                return increments
            time.sleep(0.02)
