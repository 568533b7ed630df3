"""How rewards become advantages, and advantages a loss: pure functions in registries.

`advantages` (numpy, float64) and `losses` (torch, float32) hold the two registries; `kl`,
`aggregate` and `metrics` the parts they share. A name with a colon, "package.module:function", is a
custom one.
"""
