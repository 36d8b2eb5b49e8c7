"""What the engine computes of prompts, in the words of the library: tokens, and pairs, the sum of their positions."""

SAMPLE_MIN_TOKENS = 64  # a step with fewer prefill tokens says little about the speed of prefilling
