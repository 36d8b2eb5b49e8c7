"""Which adapter (LoRA) a request runs with: by the content that the engine's worker holds, whatever the files are by
now.

vLLM's worker reads an adapter when a request with its number first runs, or earlier, when /v1/load_lora_adapter says
so. It keeps some, drops them and reads them anew. So the scheduler's side asks the worker's for each request, and the
request waits for the answer. The worker's side sees all that vLLM reads (HeldAdapters._load() stands in for vLLM's
method) and hashes the tensors. What vLLM does not hold when it is asked for is read ahead and hashed, and that very
object is handed to vLLM later. Where vLLM yet reads another content (it has dropped the adapter meanwhile, say), what
was loaded for the old one is recomputed, and nothing is saved.

Surprise: vLLM's own prefix cache tells adapters apart by name, not by content. Where a name has had two contents, a
request takes only blocks of which AdapterBlocks knows that they are of its own content.
Threads: files are read and contents hashed by a thread of the worker's side, unless vLLM itself reads one.
"""

import collections
import copy
import gc
import hashlib
import queue
import threading
from dataclasses import dataclass, field

import torch

from cachegen.fingerprint import as_text
from cachegen.vllm.guard import Outages

MAX_AHEAD = 4  # adapters that were read and that vLLM has not taken; of more, the oldest are dropped and read again

# ---- the scheduler's side ----


@dataclass(eq=False)
class Check:
    """Of one adapter for one request. Once it is done, key is (number, identity), or None: it cannot be told."""

    name: str
    is_done: bool = False
    key: tuple[int, str] | None = None


def is_outdated(key, number, identity):
    """Whether key, as a Check has it, says of the adapter of a number that it has another content than identity."""
    return key is not None and key[0] == number and key[1] != identity


@dataclass
class _Asked:
    checks: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)  # rank -> identity; rank None: one that is disabled


class AskedAdapters:
    """Used by the scheduler's thread only."""

    def __init__(self, n_ranks):
        self._n_ranks = n_ranks
        self._asked: dict[int, _Asked] = {}  # by number
        self._new = []  # LoRARequests to ask for in the next step
        self._contents = {}  # name -> identities that it has had; None: one that cannot be told
        self._n_unknown = collections.Counter()  # name -> contents that vLLM has read and that are still being hashed
        self._numbers = collections.defaultdict(set)  # name -> all that were ever asked for under it
        self._untold = collections.defaultdict(set)  # name -> of these, those of which no answer has come yet

    def start(self, adapter):
        """A Check of adapter, a LoRARequest."""
        check = Check(adapter.lora_name)
        if getattr(adapter, "load_inplace", False):  # vLLM reads it again and again
            self.give_up(check)
            return check
        if adapter.lora_int_id not in self._asked:
            self._asked[adapter.lora_int_id] = _Asked()
            self._new.append(adapter)
        if adapter.lora_int_id not in self._numbers[check.name]:
            self._numbers[check.name].add(adapter.lora_int_id)
            self._untold[check.name].add(adapter.lora_int_id)
        self._asked[adapter.lora_int_id].checks.append(check)
        return check

    def give_up(self, check):
        """It is not waited for any more."""
        if not check.is_done:
            self._answer(check, None, None)

    def take_new(self):
        """What the worker is to be asked for in the step at hand; it answers each one, in that step or a later one."""
        new, self._new = self._new, []
        return new

    def take_answers(self, answers):
        """answers: number -> rank -> identity, or None."""
        for number, by_rank in answers.items():
            asked = self._asked.get(number)
            if asked is None:
                continue
            asked.answers.update(by_rank)
            # A rank that cannot tell settles it. It may be one that is disabled and does not know which it is.
            if len(asked.answers) < self._n_ranks and None not in asked.answers.values():
                continue
            del self._asked[number]
            identities = set(asked.answers.values())
            identity = identities.pop() if len(identities) == 1 else None
            for check in asked.checks:
                self._untold[check.name].discard(number)
                if not check.is_done:
                    self._answer(check, number, identity)

    def _answer(self, check, number, identity):
        check.is_done, check.key = True, (number, identity) if identity is not None else None
        self._contents.setdefault(check.name, set()).add(identity)

    def note_taken(self, name, identity):
        """vLLM has read a content (None: not known yet), whether it was asked for or not."""
        if identity is None:
            self._n_unknown[name] += 1
        else:
            self._contents.setdefault(name, set()).add(identity)

    def note_told(self, name, identity):
        """What a content is that was not known yet; None: it cannot be told."""
        self._n_unknown[name] = max(0, self._n_unknown[name] - 1)
        self._contents.setdefault(name, set()).add(identity)

    def has_mixed_blocks(self, adapter):
        """Whether vLLM's own prefix cache may hold blocks of several contents under the name of a LoRARequest. One that
        is not known yet may be another one: it was read, or its number is a second one that the name has got."""
        name = adapter.lora_name
        has_new_number = len(self._numbers[name]) > 1 and self._untold[name]
        return bool(has_new_number or len(self._contents.get(name, ())) + self._n_unknown[name] > 1)


class AdapterBlocks:
    """Of which content of an adapter the KV in vLLM's blocks is, by block number. Used by the scheduler's thread
    only."""

    def __init__(self):
        self._keys = {}  # block -> (number, identity)

    def mark(self, block_ids, key):
        """Blocks get new content. key: as Check has it; None: of no adapter, or of one that cannot be told."""
        if key is not None:
            self._keys.update(dict.fromkeys(block_ids, key))
        elif self._keys:
            for block in block_ids:
                self._keys.pop(block, None)

    def doubt(self, number, identity):
        """vLLM has read the adapter of this number, and its content is now this one (None: not known yet). When it was
        read is not known: no block that it has computed with another content is sure to be of that."""
        for block, key in list(self._keys.items()):
            if is_outdated(key, number, identity):
                del self._keys[block]

    def others(self, block_ids, key):
        """Those of the blocks that are of another content than key's, or may be."""
        return {block for block in block_ids if key is None or self._keys.get(block, (0, None))[1] != key[1]}


# ---- the worker's side ----


def identity_of(model):
    """32 hex digits of all that is in vLLM's LoRAModel but its number; about a second a GiB."""
    digest = hashlib.blake2b(digest_size=16, person=b"cachegen-lora-2")
    _feed(digest, {name: value for name, value in vars(model).items() if name != "id"})
    return digest.hexdigest()


def _feed(digest, value):
    # Each kind is told apart, and counted, so that no two contents run together to the same bytes.
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {list(value.shape)};".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=str):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"list {len(value)};".encode())
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "__dict__"):
        _feed(digest, vars(value))
    else:
        text = as_text(value).encode()
        digest.update(b"text %d;" % len(text) + text)


@dataclass(eq=False)
class _Held:
    """A content that vLLM has taken, or will take where there is a model."""

    adapter: object  # the LoRARequest that it was read for
    model: object = None  # a LoRAModel that was read ahead
    is_known: bool = False
    identity: str | None = None  # once it is known; None: cannot be told


class HeldAdapters:
    """What a worker holds of each adapter. Used by the worker's thread; _run() is another one's."""

    def __init__(self, lora_config):
        """LookupError, AttributeError, ImportError: what reads adapters in this vLLM cannot be found, or another
        connector stands in for it."""
        self._manager = _manager_of(lora_config)
        if isinstance(getattr(self._manager._load_adapter, "__self__", None), HeldAdapters):
            raise LookupError("another connector of this engine sees to them")
        self._read = self._manager._load_adapter  # a LoRARequest -> a LoRAModel; keeps nothing
        self._lock = threading.Lock()  # of the next two, and of what they hold
        self._outages = Outages()
        self._held: dict[int, _Held] = {}  # by number
        self._asked: set[int] = set()  # numbers
        # What vLLM has read since the last call: LoRARequest, identity.
        self._taken: list[tuple[object, str | None]] = []
        self._told: list[tuple[object, str | None]] = []  # of what it had read, what has become known since
        self._news = threading.Event()  # one more is known
        self._jobs = queue.SimpleQueue()  # (_Held, a LoRAModel or None: read one ahead)
        threading.Thread(target=self._run, name="cachegen-adapters", daemon=True).start()
        self._manager._load_adapter = self._load

    def ask(self, adapter):
        number = adapter.lora_int_id
        self._asked.add(number)
        with self._lock:
            held = self._held.get(number)
            is_coming = held is not None and (not held.is_known or held.model is not None)
            if number not in self._manager.list_adapters() and not is_coming:
                held = self._held[number] = _Held(adapter)
                self._jobs.put((held, None))

    def wait(self, timeout_s):
        """Until one more is known, so long at most; not at all where none is asked for."""
        if self._asked:
            self._news.wait(timeout_s)
            self._news.clear()

    def take_answers(self):
        """number -> identity, or None, of those that were asked for and are known by now."""
        answers = {}
        with self._lock:
            for number in self._asked:
                held = self._held.get(number)
                if held is None or held.is_known:
                    answers[number] = None if held is None else held.identity
        self._asked -= answers.keys()
        return answers

    def holds(self, key):
        """Whether requests with the adapter of key, (number, identity), have run with that content in the step at hand,
        or will in the next."""
        number, identity = key
        with self._lock:
            held = self._held.get(number)
            return held is not None and held.is_known and held.identity == identity

    def take_taken(self):
        """What vLLM has read since the last call, in its order: (LoRARequest, identity, or None: not known yet)."""
        with self._lock:
            taken, self._taken = self._taken, []
        return taken

    def take_told(self):
        """Of what vLLM had read and was not known yet, what has become known since the last call: (LoRARequest,
        identity, or None: it cannot be told)."""
        with self._lock:
            told, self._told = self._told, []
        return told

    def close(self):
        self._jobs.put(None)
        self._manager._load_adapter = self._read

    def _load(self, adapter):
        """vLLM's _load_adapter(). What that raises is vLLM's; nothing else is raised."""
        number = adapter.lora_int_id
        with self._lock:
            held = self._held.pop(number, None)
            if held is not None and held.model is not None and _reads_the_same(held.adapter, adapter):
                model, held.model = held.model, None
                self._held[number] = held
                self._taken.append((adapter, held.identity))
                return model
        model = self._read(adapter)
        held = _Held(adapter)
        with self._lock:
            self._held[number] = held
            self._taken.append((adapter, None))
        try:
            # Copies, because tensors may be mapped files, and because vLLM will change what it gets.
            model = copy.deepcopy(model)
            self._jobs.put((held, copy.deepcopy(model)))
        except Exception as e:
            with self._lock:
                self._is_lost(held, e)
                self._told.append((adapter, None))
        return model

    def _is_lost(self, held, error):
        self._outages.failed(_unreadable(held), f"requests with it are neither stored nor served: {error}")
        held.is_known, held.identity = True, None
        self._news.set()

    def _run(self):
        while (job := self._jobs.get()) is not None:
            held, model = job
            is_ahead = model is None
            try:
                model = copy.deepcopy(self._read(held.adapter)) if is_ahead else model
                identity = identity_of(model)
            except Exception as e:
                with self._lock:
                    self._is_lost(held, e)
                    if not is_ahead:
                        self._told.append((held.adapter, None))
                continue
            with self._lock:
                self._outages.worked(_unreadable(held))
                held.is_known, held.identity, held.model = True, identity, model if is_ahead else None
                if not is_ahead:
                    self._told.append((held.adapter, identity))
                ahead = [other for other in self._held.values() if other.model is not None]
                for other in ahead[:-MAX_AHEAD]:
                    other.model = None
            self._news.set()
            del job, held, model


def _unreadable(held):
    """A kind of outage."""
    return f"adapter {held.adapter.lora_name} cannot be read"


def _reads_the_same(adapter, other):
    return all(
        getattr(adapter, name, None) == getattr(other, name, None)
        for name in ("lora_path", "load_inplace", "is_3d_lora_weight")
    )


def _manager_of(lora_config):
    """vLLM's WorkerLoRAManager in this process that has this very configuration; LookupError, ImportError. vLLM hands
    it to nobody."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    for found in gc.get_objects():
        if issubclass(type(found), WorkerLoRAManager) and found.lora_config is lora_config:
            return found
    raise LookupError("vLLM's worker has no manager of adapters")
