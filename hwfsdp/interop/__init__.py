"""What other programs expect of torch's FSDP2.

install      torch's public names become ours
torch_view   torch's names for attributes that its pipelines, trackers and some programs read
pipelines    checks of modules that run in a stage of torch's pipelines
profiler     the ranges of FSDP2 in torch's profiler
"""
