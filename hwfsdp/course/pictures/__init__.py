"""The pictures of exercises: `exercises/01_rows/picture.png` is `pictures.rows.draw()`. Exercises without a module have none."""
