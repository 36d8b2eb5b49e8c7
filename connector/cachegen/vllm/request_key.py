"""What a request is and wants: the parts of its key that are not tokens, and its wishes in kv_transfer_params.

A chunk's key is made in the library, from the model's fingerprint, the tokens from the first one on, the salt, and what
extra_key() gives. Two requests with the same key have the same KV.
"""

import json
from dataclasses import dataclass

PREFIX = "cachegen."


@dataclass
class Options:
    context: str | None = None  # a name to publish the prompt under
    worst_level: int | None = None  # the worst quality accepted; None: the configuration's
    level: int | None = None  # the one level to use; None: as the budget wants
    ttft_budget_ns: int = 0  # 0: the configuration's


def parse_level(value):
    """0 ... 3 of "L0" ... "L3"; ValueError."""
    if isinstance(value, str) and len(value) == 2 and value[0] in "Ll" and value[1] in "0123":
        return int(value[1])
    raise ValueError(f"{value!r} is no level: L0 ... L3")


def parse_options(params):
    """The Options in a request's kv_transfer_params, which may be None; ValueError."""
    params = params or {}
    options = Options()
    if (context := params.get(PREFIX + "context")) is not None:
        options.context = str(context)
    if (level := params.get(PREFIX + "worst_level")) is not None:
        options.worst_level = parse_level(level)
    if (level := params.get(PREFIX + "level")) is not None:
        options.level = parse_level(level)
    if (budget := params.get(PREFIX + "ttft_budget_ms")) is not None:
        options.ttft_budget_ns = max(0, int(float(budget) * 1e6))
    return options


def extra_key(request, adapter=None):
    """What makes the request's KV differ besides tokens and salt, as bytes; None if that cannot be told. adapter: the
    identity of the adapter that the request names, None if that cannot be told."""
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None or not request.prompt_token_ids:
        return None
    key = {}
    if request.lora_request is not None:
        if adapter is None:
            return None
        key["lora"] = [request.lora_request.lora_name, adapter]
    if request.mm_features:
        key["mm"] = [[f.identifier, f.mm_position.offset, f.mm_position.length] for f in request.mm_features]
    return json.dumps(key, sort_keys=True, separators=(",", ":")).encode() if key else b""
