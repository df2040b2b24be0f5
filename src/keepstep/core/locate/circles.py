"""Circles: in a graph of what waits for what, parts that lead back to themselves, and what closes them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def components(graph: Mapping[N, Collection[N]]) -> Iterator[set[N]]:
    """Strongly connected components (Kosaraju's two passes, without recursion)."""
    order: list[N] = []
    seen: set[N] = set()
    for root in graph:
        stack = [(root, iter(graph[root]))] if root not in seen else []
        seen.add(root)
        while stack:
            node, others = stack[-1]
            if (after := next((o for o in others if o not in seen), None)) is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(after)
                stack.append((after, iter(graph[after])))
    back: dict[N, set[N]] = {node: set() for node in graph}
    for node, waited in graph.items():
        for other in waited:
            back[other].add(node)
    seen.clear()
    for root in reversed(order):
        if root in seen:
            continue
        part, todo = {root}, [root]
        seen.add(root)
        while todo:
            fresh = back[todo.pop()] - seen
            seen |= fresh
            part |= fresh
            todo += fresh
        yield part


def short_circle(graph: Mapping[N, Collection[N]]) -> list[N]:
    """A shortest circle through the first node of a part that is one component."""
    start = next(iter(graph))
    before: dict[N, N] = {}
    todo = [start]
    for node in todo:
        for other in graph[node]:
            if other == start:
                found = [node]
                while found[-1] != start:
                    found.append(before[found[-1]])
                return found
            if other not in before:
                before[other] = node
                todo.append(other)
    return list(graph)


def has_circle(graph: Mapping[N, Collection[N]], *, without: N) -> bool:
    """Whether there still is one when a node is taken out."""
    rest = {node: [o for o in others if o != without] for node, others in graph.items() if node != without}
    return any(len(part) > 1 for part in components(rest))
