"""Walks over the parts of an ONNX ModelProto."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

# Domains whose operators every ONNX Runtime includes.
BUILT_IN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})

# Name of the operator in front of a network that computes only the first image of a batch.
FIRST_IMAGE = "first_image_only"


def opsets(model: Any) -> dict[str, int]:
    """Return the version of each operator set; if a domain has several, ONNX Runtime uses the last."""
    return {"" if opset.domain == "ai.onnx" else opset.domain: opset.version for opset in model.opset_import}


def metadata(model: Any) -> dict[str, str]:
    """Return the metadata of a ModelProto; strings that are not UTF-8, bytes in protobuf, are left out."""
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return {key: text for key, text in texts.items() if isinstance(key, str) and isinstance(text, str)}


def tensors(model: Any) -> Iterator[Any]:
    """Yield every TensorProto of a ModelProto: weights and constants, also in subgraphs and functions."""
    for graph in graphs(model.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
    for node in nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def is_external(tensor: Any) -> bool:
    """Return whether the values of a TensorProto are in another file."""
    return bool(tensor.data_location == 1)


def names(model: Any) -> Iterator[Any]:
    """Yield every name in a ModelProto; protobuf returns bytes if a name is not UTF-8."""
    yield from (declaration.domain for declaration in (*model.opset_import, *model.functions))
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for tensor in tensors(model):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    for node in nodes(model):
        yield from (node.op_type, node.domain, *node.input, *node.output)


def custom_domains(model: Any) -> tuple[str, ...]:
    """Return the domains of operators that ONNX Runtime does not include, sorted."""
    known = BUILT_IN_DOMAINS | {function.domain for function in model.functions}
    return tuple(sorted({node.domain for node in nodes(model)} - known))


def nodes(model: Any) -> Iterator[Any]:
    """Yield every operator of a ModelProto, also in subgraphs and functions."""
    for graph in graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and its subgraphs, such as the branches of an If."""
    yield graph
    for node in graph.node:
        for inner in _subgraphs(node):
            yield from graphs(inner)


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def sort(model: Any) -> bool:
    """Order the operators of a ModelProto by dependency as ONNX demands, also in subgraphs and functions.

    Returns whether that changed the order. A graph with a cycle is left for the checker to refuse.
    """
    scopes = [graph for scope in (model.graph, *model.functions) for graph in graphs(scope)]
    # The inner ones first, because a sorted graph has copies of its subgraphs.
    changes = [_sort(scope.node) for scope in reversed(scopes)]
    return any(changes)


def _sort(operators: Any) -> bool:
    unsorted = [*operators]
    origins = {name: index for index, node in enumerate(unsorted) for name in node.output if name}
    needs = {
        index: {origins[name] for name in _reads(node) & origins.keys()}
        for index, node in enumerate(unsorted)
    }
    if all(need < index for index, needed in needs.items() for need in needed):
        return False
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError:
        return False
    del operators[:]
    operators.extend(unsorted[index] for index in order)
    return True


def _reads(node: Any) -> set[str]:
    """Return the tensors that an operator reads, also those that its subgraphs read from outside."""
    names = {*node.input}
    for graph in _subgraphs(node):
        inner = {output.name for output in graph.output}.union(*map(_reads, graph.node))
        own = {value.name for value in (*graph.input, *graph.initializer)}
        names |= inner - own - {name for operator in graph.node for name in operator.output}
    return names
