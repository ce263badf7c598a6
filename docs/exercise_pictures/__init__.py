"""The pictures of exercises: `exercises/01_rows/picture.png` is `rows.draw()`. Exercises without a module here have none."""
