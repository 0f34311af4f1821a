"""Tools of OpenAI's Responses API: functions, alone and in namespaces.

Source: OpenAI's API reference, "Create a model response", tools of type "function" and "namespace". The policy knows a function of a
namespace by one name for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Conflicts, function, text_of
from asyncmoe.rollout.episodes.openai_endpoint.request import wrong


def tools_of(tools: Sequence[Any], conflicts: Conflicts) -> list[Message]:
    """Return all functions of a request in the form chat templates accept, those of namespaces by their full names.

    Raises:
        RequestRefused: a tool is no function.
    """
    made: list[Message] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            made.append(_function(tool, where, conflicts))
            continue
        name, inner = text_of(tool.get("name"), f"{where}.name"), tool.get("tools")
        if not isinstance(inner, list) or set(tool) - {"type", "name", "description", "tools"}:
            raise wrong(where, "must have a name, a description and a list of tools")
        for j, one in enumerate(inner):
            told = _function(one, f"{where}.tools[{j}]", conflicts)
            made.append({**told, "function": {**told["function"], "name": full_name(name, told["function"]["name"])}})
    names = [tool["function"]["name"] for tool in made]
    if any(tool["type"] == "namespace" for tool in tools) and len(set(names)) < len(names):
        raise wrong("tools", "must have different names; a function of a namespace is named NAMESPACE__FUNCTION")
    return made


def full_name(namespace: str, name: str) -> str:
    """Return the policy's name of a function in a namespace: letters and underscores, which every parser of calls accepts."""
    return f"{namespace}__{name}"


def client_name(tools: Sequence[Mapping[str, Any]] | None, name: str) -> dict[str, str]:
    """Return the client's name of a function that the policy called, with its namespace if it has one.

    Args:
        tools: those of the request, which `tools_of` has checked.
    """
    for tool in tools or ():
        if tool["type"] == "namespace" and any(name == full_name(tool["name"], one["name"]) for one in tool["tools"]):
            return {"name": name.removeprefix(full_name(tool["name"], "")), "namespace": tool["name"]}
    return {"name": name}


def _function(tool: object, where: str, conflicts: Conflicts) -> Message:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise wrong(where, "must be a function; tools that a server would run are not supported")
    if unknown := set(tool) - {"type", "name", "description", "parameters", "strict", "allowed_callers"}:
        raise wrong(f"{where}.{min(unknown)}", "is not supported. Leave it out")
    if tool.get("strict"):
        conflicts.note("tools.strict", "cannot force arguments to a schema")
    return function(tool.get("name"), tool.get("description"), tool.get("parameters"), where)
