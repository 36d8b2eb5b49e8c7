"""What a request is and wants: the parts of its key that are not tokens, and its wishes in kv_transfer_params.

A chunk's key is made in the library, from the model's fingerprint, the tokens from the first one on, the salt, and what
extra_key() gives. Two requests with the same key have the same KV.

Surprise: what vLLM calls an image's hash need not be one. A client may give a name of its own choice ("uuid"), and an
engine that caches no images numbers them, from 1 on in every process. is_hashed() tells these.

An image's placeholders are the same tokens for every image. So key_tokens() puts its hash in their place: what comes
before the first image is shared by all requests that begin alike, and what comes after an image only by those that have
it, too.
"""

import array
import hashlib
import json
import os
import re
from dataclasses import dataclass

PREFIX = "cachegen."
MAX_NAME_BYTES = 255
MAX_BUDGET_MS = 86_400_000  # as the configuration's; more would not fit into the library's ns
_SALTED = re.compile("@[0-9a-f]{16}$")
# What kv_transfer_params may have behind PREFIX: in a request, and besides in an answer.
WISHES = ("context", "worst_level", "level", "ttft_budget_ms", "quality")
TOLD = (
    "hit_tokens", "levels", "predicted_kl", "bytes", "bytes_dropped", "provenance", "context_refused", "refused",
    "lookup_ms", "load_ms", "read_ms", "decode_ms", "copy_ms",
)  # fmt: skip


class BadOption(ValueError):
    """Why a request's kv_transfer_params cannot be followed. key: one of WISHES, or "" where it is none of them."""

    def __init__(self, key, why):
        super().__init__(why)
        self.key = key


@dataclass
class Options:
    context: str | None = None  # a name to publish the prompt under, as it is in the store
    refused_context: str | None = None  # why the name that was given cannot be used: it costs only the name
    worst_level: int | None = None  # the worst quality accepted; None: the configuration's
    level: int | None = None  # the one level to use; None: as the budget wants
    ttft_budget_ns: int = 0  # 0: the configuration's
    max_kl: float = 0  # the largest predicted KL divergence of what is loaded, in nats; 0: any


def parse_level(value):
    """0 ... 3 of "L0" ... "L3"; ValueError."""
    if isinstance(value, str) and len(value) == 2 and value[0] in "Ll" and value[1] in "0123":
        return int(value[1])
    raise ValueError(f"{value!r:.80} is no level: L0 ... L3")


def stored_context(name, salt):
    """The name in the store of what a client with a salt (None: without) calls name; ValueError. Each salt has a space
    of its own, which ends in the salt's digest, so that no tenant replaces what another has published."""
    if not isinstance(name, str) or not name or name[0] == "." or "/" in name or not name.isprintable():
        raise ValueError(f"{name!r:.80} cannot name a context: printable characters, no '/', and no '.' at the start")
    if salt:
        name += "@" + hashlib.blake2b(salt.encode(), digest_size=8, person=b"cachegen-salt").hexdigest()
    elif _SALTED.search(name):
        raise ValueError(f"{name!r:.80} ends as the contexts of a tenant do")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"the name of a context is longer than {MAX_NAME_BYTES} bytes, the salt's part included")
    return name


def parse_options(params, salt=None):
    """The Options in a request's kv_transfer_params, which may be None; BadOption. Keys of an answer are no wishes, and
    are passed over: proxies hand the answer of an engine that stores on to one that loads."""
    params = params or {}
    if PREFIX + "hit_tokens" in params:  # as in each answer: then these two say what was done
        params = {key: value for key, value in params.items() if key not in (PREFIX + "context", PREFIX + "level")}
    options = Options()
    for key in params:
        if str(key).startswith(PREFIX) and key[len(PREFIX) :] not in (*WISHES, *TOLD):
            raise BadOption("", f"{key!r:.80} is unknown: {', '.join(WISHES)} are known behind {PREFIX}")
    if (context := params.get(PREFIX + "context")) is not None:
        try:
            options.context = stored_context(context, salt)
        except ValueError as e:
            options.refused_context = str(e)
    options.worst_level = _read(params, "worst_level", parse_level)
    options.level = _read(params, "level", parse_level)
    if None not in (options.level, options.worst_level) and options.level > options.worst_level:
        raise BadOption("level", f"{PREFIX}level L{options.level} is worse than {PREFIX}worst_level")
    options.ttft_budget_ns = _read(params, "ttft_budget_ms", _parse_budget) or 0
    options.max_kl = _read(params, "quality", _parse_quality) or 0
    if options.max_kl and options.level is not None:
        raise BadOption("quality", f"{PREFIX}quality does not go with {PREFIX}level")
    return options


def _read(params, key, parse):
    """None: it was not given."""
    if (value := params.get(PREFIX + key)) is None:
        return None
    try:
        return parse(value)
    except ValueError as e:
        raise BadOption(key, f"{PREFIX}{key}: {e}") from None


def _parse_number(value):
    if isinstance(value, bool):  # float() takes it for 0 or 1
        raise ValueError(f"{value!r} is no number")
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{value!r:.80} is no number") from None


def _parse_budget(value):
    number = _parse_number(value)
    if not number > 0:
        raise ValueError(f"{number} is no time above 0")
    return max(1, int(min(number, MAX_BUDGET_MS) * 1e6))  # 0 would be the configuration's


def _parse_quality(value):
    number = _parse_number(value)
    if not 0 < number < 1000:
        raise ValueError(f"{number} is no KL divergence above 0 and below 1000")
    return number


# Of 31 bits each: no vocabulary is as large, so no text can look like an image. Four of them are as good as the keys.
STAND_IN = 1 << 31
MIN_STAND_INS = 4
_DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")  # of vLLM's mm_hasher_algorithm: blake3 or sha256, sha512


def is_hashed(feature):
    """Whether what vLLM knows an image by is a hash of its content, as far as its form tells."""
    # identifier begins with the adapter's name where adapters change what becomes of images.
    name = getattr(feature, "mm_hash", None) or feature.identifier
    return isinstance(name, str) and _DIGEST.fullmatch(name) is not None


def key_tokens(request, unit, image_key=""):
    """The prompt as the library gets it, an array.array('I'): its tokens, and stand-ins where images and the like are.
    unit: every chunk that may be stored ends at a multiple of it. Each unit that an image reaches into has
    MIN_STAND_INS at least, also where that takes the place of text beside the image: a chunk may end after any of them.
    ValueError: units are too short for that. image_key: the engine's (model_key.py). Images that cannot be keyed have
    random stand-ins, so that nothing is found from there on."""
    tokens = array.array("I", request.prompt_token_ids)
    for feature in request.mm_features:
        if unit < MIN_STAND_INS:
            raise ValueError("images are keyed by their hashes, in units of 4 tokens or more (tail_multiple)")
        first = feature.mm_position.offset
        end = min(first + feature.mm_position.length, len(tokens))
        is_keyed = image_key is not None and is_hashed(feature)
        identifier = feature.identifier if is_keyed else os.urandom(16).hex()
        name = f"{identifier} {first} {feature.mm_position.length} {image_key + ' ' if image_key else ''}".encode()
        for begin in range(first // unit * unit, end, unit):
            # What is replaced of this unit: the image's part of it, widened where it is shorter
            # than MIN_STAND_INS. The digest is of the replaced tokens, too, so that no text among
            # them is lost to the key.
            high = min(max(end, begin + MIN_STAND_INS), begin + unit, len(tokens))
            low = max(begin, min(first, high - MIN_STAND_INS))
            digest = hashlib.shake_128(name + b"%d " % begin + tokens[low:high].tobytes())
            words = array.array("I", digest.digest(4 * (high - low)))
            tokens[low:high] = array.array("I", (word | STAND_IN for word in words))
    return tokens


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
    return json.dumps(key, sort_keys=True, separators=(",", ":")).encode() if key else b""
