"""Models to shard.

gpt     a byte-level GPT, small enough to train on a CPU
llama   Llama, in the sizes that are common in comparisons
zoo     both models by name, in published sizes; the model that your own function returns
"""

from hwfsdp.train.models.gpt import GPT, GPTConfig, next_byte_loss

__all__ = ["GPT", "GPTConfig", "next_byte_loss"]
