"""Models to shard.

gpt     a byte-level GPT, small enough to train on a CPU
llama   Llama, in the sizes that the field compares itself on
zoo     both by name
"""

from hwfsdp.models.gpt import GPT as GPT
from hwfsdp.models.gpt import GPTConfig as GPTConfig
from hwfsdp.models.gpt import next_byte_loss as next_byte_loss
