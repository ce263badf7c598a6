"""Grade a class: submissions of every form, several at once, and write a gradebook in the requested format.

`submissions` reads the submissions. `jobs` grades them in separate processes. `journal` saves every result at once.
`grading.grade_class` puts these together. `formats` writes gradebooks. This folder does not grade single exercises:
`hwfsdp.course.grade` does.
"""
