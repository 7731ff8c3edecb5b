"""The manifests for Kubernetes and Compose: valid, and they start what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_blocks import ROOT

from segue.cli.main import parser
from segue.graph.deployment.deployment import Hardware, Limits
from segue.graph.deployment.loader import load_plan
from segue.messages.join import PORT
from segue.models.omni.qwen2_5_omni.graph import graph

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
LAPTOP = Hardware(8, 32 << 30)
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def templates(found: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in a manifest, of whatever kind."""
    if isinstance(found, dict):
        if "template" in found:
            yield found["template"]
        for value in found.values():
            yield from templates(value)
    elif isinstance(found, list):
        for value in found:
            yield from templates(value)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(file, arguments of `segue`) of every container that has some."""
    for path in MANIFESTS:
        for template in templates(documents(path)):
            for container in template["spec"]["containers"]:
                if "args" in container:
                    yield path.name, [word.replace("$(POD_IP)", "10.0.0.1") for word in container["args"]]
    for path in COMPOSE:
        for service in documents(path)[0]["services"].values():
            yield path.name, [re.sub(r"\$\{\w+:\?\}", "10.0.0.1", word) for word in service["command"]]


def test_containers_start_commands_that_there_are() -> None:
    found = dict[str, set[str]]()
    for name, words in commands():
        arguments = parser().parse_args(words)
        found.setdefault(name, set()).add(words[0])
        if words[0] == "serve":
            assert (arguments.host, arguments.listen) == ("0.0.0.0", "10.0.0.1")
        else:
            assert (arguments.name, arguments.model) == ("second", ["/model"])
    assert found == {
        "segue.yaml": {"serve", "join"},
        "kuberay.yaml": {"serve"},
        "server.yaml": {"serve"},
        "node.yaml": {"join"},
    }


def test_the_parts_of_a_manifest_fit_together() -> None:
    found = documents(DEPLOY / "kubernetes" / "segue.yaml")
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in found}
    plan = load_plan(
        graph({}), yaml.safe_load(by_name["ConfigMap", "segue"]["data"]["deployment.yaml"]), hardware=LAPTOP
    )
    assert plan.nodes() == ("second",)
    [join] = by_name["Service", "segue-join"]["spec"]["ports"]
    assert join["port"] == PORT
    server = by_name["Deployment", "segue"]["spec"]["template"]
    for name in ("segue", "segue-join"):
        selector = by_name["Service", name]["spec"]["selector"]
        assert selector.items() <= server["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in server["spec"]["containers"][0]["ports"]}
    assert ports == {"http": parser().parse_args(["serve", "."]).port, "join": PORT}
    drains = parser().parse_args(["serve", "."]).drain_seconds + Limits().drain_seconds
    assert server["spec"]["terminationGracePeriodSeconds"] > drains
    for template in templates(found):
        mounted = {mount["name"] for container in template["spec"]["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


@pytest.mark.needs("kubernetes_validate")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_takes_them(path: Path) -> None:
    """What is of Kubernetes as it stands; of KubeRay's kind the pods that it makes."""
    import kubernetes_validate

    for document in documents(path):
        checked = [document]
        if "." in document["apiVersion"].partition("/")[0] and not document["apiVersion"].endswith(".k8s.io/v1"):
            checked = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates(document)]
            assert len(checked) == 2
        for one in checked:
            one.setdefault("metadata", {}).setdefault("name", "segue")
            kubernetes_validate.validate(one, "1.30", strict=True)
