"""cachegenfs for Python.

An engine uses vllm (the connector) and abi (the binding of libcachegen.so). Whoever makes profiles uses two commands:
profile runs the model over text, self_profile reads what a store holds. Both build on make_profile, which goes from
contexts of a kv_model through klt, steps, sinks, tables and assemble to a profile_file. paper makes profiles of
CacheGen's own codec, to compare with; quality measures; fingerprint names a model.

Importing the package loads neither the library nor an engine.
"""


class Unsupported(Exception):
    """A model that the tools refuse; the text names what it has."""
