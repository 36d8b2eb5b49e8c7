"""cachegenfs for Python: the binding of libcachegen.so (abi), the vLLM connector (vllm), the profile tool (profile).

Importing the package loads neither the library nor an engine.
"""
