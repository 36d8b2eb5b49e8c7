"""What the scheduler's side knows of a request when vLLM names it for the first time: what it is, and what it wants.

A request that cannot be keyed, or wants what cannot be had, gets a state, too: it is neither stored nor served, and its
answer says why.
"""

import array

from cachegen.vllm.request_key import BadOption, Options, extra_key, is_hashed, key_tokens, parse_options
from cachegen.vllm.request_state import RequestState

# Kinds of outages.
REQUESTS, NAMES = "requests that are neither stored nor served", "names of contexts that cannot be used"


def salt_of(request, root):
    return root + (request.cache_salt or "").encode()


def new_request(request, library, root, outages):
    """A RequestState. Of a request with an adapter it is not known yet whether and by what it can be keyed: its extra
    says only that all else can. root: of the last reset. outages: hear of requests that cannot be followed."""
    options = Options(worst_level=0)  # what cannot be read may ask for the best
    tokens, extra, report = None, None, {}
    try:
        options = parse_options(request.kv_transfer_params, request.cache_salt)
        extra = extra_key(request, adapter="unknown" if request.lora_request is not None else None)
        if extra is not None:
            tokens = key_tokens(request, library.tail_tokens, library.image_key)
    except Exception as e:
        # A kind for each key: what one client asks for hides no other one's mistake in the log.
        kind = f"{REQUESTS} ({e.key or 'unknown key'})" if isinstance(e, BadOption) else REQUESTS
        outages.failed(kind, f"request {request.request_id}: {e}")
        report["refused"] = str(e)
        extra = None
    else:
        for kind in outages.under_way():
            if kind.startswith(REQUESTS):
                outages.worked(kind)
    if options.refused_context is not None:
        report["context_refused"] = options.refused_context
        outages.failed(NAMES, options.refused_context)
    elif options.context is not None:
        outages.worked(NAMES)
        report["context"] = options.context
    if extra is not None and len(request.prompt_token_ids) < library.min_tokens:
        extra = None
    return RequestState(
        request,
        tokens if extra is not None else array.array("I"),
        salt_of(request, root),
        root,
        extra,
        options,
        request.arrival_time,
        adapter_number=0 if request.lora_request is None else request.lora_request.lora_int_id,
        budget_ns=options.ttft_budget_ns or library.ttft_budget_ns,
        prompt_tokens=len(request.prompt_token_ids or ()),
        storable_tokens=_n_storable_tokens(request, library),
        report=report,
    )


def _n_storable_tokens(request, library):
    """How many of a prompt's first tokens may be stored as far as its images go. What comes after one without a hash
    has no key. The codec turns K back by plain positions, and what an image moves would be coded badly."""
    keep_none = library.needs_plain_positions or library.image_key is None
    images = (image for image in request.mm_features if keep_none or not is_hashed(image))
    return min((image.mm_position.offset for image in images), default=len(request.prompt_token_ids or ()))
