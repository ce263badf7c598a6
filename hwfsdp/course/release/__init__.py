"""The student's edition of the project: the same tree without the answers."""
