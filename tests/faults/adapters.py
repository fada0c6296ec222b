"""What an engine may make of an adapter that it was given: {layer: its tensors}, in this package's record or 843f908's."""

import dataclasses


def scaled(factor: float):
    return lambda adapter: {name: dataclasses.replace(t, b=t.b * factor) for name, t in adapter.items()}


def without(part):
    return lambda adapter: {name: tensors for name, tensors in adapter.items() if not part(name)}


def exchanged(adapter):
    places = {n: n.replace("k_proj", "v_proj") if "k_proj" in n else n.replace("v_proj", "k_proj") for n in adapter}
    return {name: adapter[places[name]] for name in adapter}
