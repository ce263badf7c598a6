"""`make gpu`: every check of hwfsdp that needs a GPU, in one command without manual setup.

    make gpu                        all parts, each within ten minutes; needs one GPU
    make gpu PARTS="races speed"    these parts
    make gpu DRY=1                  the same on the CPU, which tests everything except the CUDA calls
    make gpu OUT=folder             the folder for gpu.json and gpu.md; by default docs

To read, in this order:

    start     finds a Python whose torch sees the GPU, or makes one; needs no torch itself
    parts     what is run: names, commands, and what they need
    __main__  runs them, one process each, and keeps their results
    page      writes docs/gpu.md from them
    speed     one case beside FSDP2
    small     the step that compute-sanitizer watches
    same      offloaded, compiled and other cases beside FSDP2
"""
