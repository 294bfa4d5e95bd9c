#!/usr/bin/env python3
"""Finds circles among the library's rooms, which bazel allows: it forbids them among targets alone.

Usage: bazelw query --output=graph --nograph:factored 'deps(...)' | room_circles.py
Prints the rooms and dependencies of each circle, and exits 1 if there is one.

A room is a folder of a layer. A layer's public target, such as //engine:engine, depends on its rooms
and is a room of its own.
"""

import re
import sys

LAYERS = ["allocator", "device", "engine", "hooks"]

_EDGE = re.compile(r'^\s*"//([^":]+):([^":]+)" -> "//([^":]+):([^":]+)"$')
# The folder compiled as one file, which needs what all of the folder's targets need.
_ONE_FILE = re.compile(r"^one_file(_source)?$|_text$")


def _room(package, target):
    return f"//{package}:{target}" if package == target else f"//{package}"


def room_dependencies(graph):
    """{(room, room): [dependency]} of the text that bazel prints."""
    rooms = {}
    for line in graph.splitlines():
        edge = _EDGE.match(line)
        if edge is None:
            continue
        package, target, to_package, to_target = edge.groups()
        if not all(name.split("/")[0] in LAYERS for name in (package, to_package)):
            continue
        if _ONE_FILE.search(target) or _ONE_FILE.search(to_target):
            continue
        room, to_room = _room(package, target), _room(to_package, to_target)
        if room != to_room:
            rooms.setdefault((room, to_room), []).append(f"//{package}:{target} -> //{to_package}:{to_target}")
    return rooms


def circles(dependencies):
    """Sets of rooms that all reach each other, of more than one room."""
    after = {}
    for room, to_room in dependencies:
        after.setdefault(room, set()).add(to_room)

    def reached(room):
        seen, ahead = set(), [room]
        while ahead:
            new = after.get(ahead.pop(), set()) - seen
            seen |= new
            ahead.extend(new)
        return seen

    reach = {room: reached(room) for room in after}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]})


def complaints(graph):
    """Lines; none where all is well."""
    dependencies = room_dependencies(graph)
    if not dependencies:
        yield "bazel named no dependency between two rooms"
    for circle in circles(dependencies):
        yield "a circle of " + ", ".join(circle)
        for (room, to_room), edges in sorted(dependencies.items()):
            if room in circle and to_room in circle:
                yield from (f"  {edge}" for edge in edges)


if __name__ == "__main__":
    lines = list(complaints(sys.stdin.read()))
    print("\n".join(lines))
    sys.exit(1 if lines else 0)
