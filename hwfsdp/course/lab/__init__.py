"""The broken lab: scripts that train wrongly. Learners name the cause and the fix, and prove it with evidence.

`bugs` defines a bug, `answers` reads a learner's answers, `running` runs a script, `evidence` measures the run, `seals`
protect the key, `grading` judges, `report` and `commands` print, `workshop` writes the files. `bugs`, `answers`, `report` and
`commands` do not import torch, so that `hwfsdp lab N` answers at once.
"""
