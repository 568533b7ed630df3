"""How rewards become advantages, and advantages a loss: pure functions in registries.

`advantages` (numpy, float64) and `losses` (torch, float32) hold the two registries, `corrections`
the third, of what is done about tokens of another policy; `kl`, `aggregate` and `metrics` are the
parts they share. A name with a colon, "package.module:function", is a custom one.
"""
