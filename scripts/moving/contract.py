"""Put the layer contract of the runtime into pyproject.toml."""

from pathlib import Path

path = Path("pyproject.toml")
text = path.read_text()


def put(old: str, new: str) -> None:
    global text
    assert text.count(old) == 1, old
    text = text.replace(old, new)


put("{model,model_state,optimizer}", "{model,state_dict,optimizer}")
put(
    '''# What only type checkers read loads nothing: `smpkit` names the runtime's classes for them, and imports them when asked.
exclude_type_checking_imports = true
''',
    '''# An import for type checkers only is a dependency of a reader all the same.
exclude_type_checking_imports = false
''',
)
put(
    '''    "smpkit.errors",
]

[[tool.importlinter.contracts]]
name = "The product does not import what users test with"
''',
    '''    "smpkit.errors",
]
# `smpkit.OffloadModel`: named for type checkers, imported when asked for.
ignore_imports = ["smpkit -> smpkit.torch.offload_model"]

[[tool.importlinter.contracts]]
name = "The floors of the runtime"
type = "layers"
containers = ["smpkit.torch"]
exhaustive = true
layers = [
    "compat | reference",
    "checkpoints",
    "api : model : optimizer : step : state_dict : describe : offloading : amp : optimizers : nn",
    "optim | recompute",
    "data_parallel | pipeline",
    "tensor_parallel | precision | offload_model",
    "placement | offload",
    "distributed",
    "core",
]

[[tool.importlinter.contracts]]
name = "The product does not import what users test with"
''',
)
put(
    '''forbidden_modules = ["torch", "smpkit.torch"]
''',
    '''forbidden_modules = ["torch", "smpkit.torch"]
ignore_imports = ["smpkit -> smpkit.torch.offload_model"]
''',
)
path.write_text(text)
