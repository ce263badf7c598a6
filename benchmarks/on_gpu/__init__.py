"""`make gpu`: everything of hwfsdp that only a GPU can show, by one command, without setting anything up by hand.

    make gpu                        all parts, each within ten minutes; needs one GPU
    make gpu PARTS="races speed"    these parts
    make gpu DRY=1                  the same on the CPU, which tries out all of it but the calls of CUDA
    make gpu OUT=folder             where gpu.json and gpu.md are written; by default docs

To read, in this order:

    start     finds a Python whose torch sees the GPU, or makes one; needs no torch itself
    parts     what is run: names, commands, and what they need
    __main__  runs them, one process each, and keeps what they said
    page      writes docs/gpu.md from that
    speed     one case beside FSDP2
    small     the step that compute-sanitizer watches
    older     two names for torch below 2.13
"""
