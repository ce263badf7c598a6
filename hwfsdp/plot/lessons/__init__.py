"""The pictures of the exercises, a module for each: `exercises/01_shard_math/picture.png` is `lessons.shard_math.draw()`."""
