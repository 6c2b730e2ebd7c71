"""The cluster files are accepted by the schema that the installed Ray ships, and by Ray's own reader."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ["ray_cluster.yaml", "examples/ray_cluster_aws.yaml"]


def schema() -> dict:
    import ray

    return json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


@pytest.mark.parametrize("name", FILES)
def test_valid_against_the_schema_of_the_installed_ray(name: str) -> None:
    jsonschema.validate(yaml.safe_load((ROOT / name).read_text()), schema())


def test_the_schema_refuses_what_is_wrong() -> None:
    config = yaml.safe_load((ROOT / FILES[0]).read_text())
    config["max_workerz"] = 3
    with pytest.raises(jsonschema.ValidationError, match="max_workerz"):
        jsonschema.validate(config, schema())


def test_ray_itself_prepares_the_on_premises_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((ROOT / FILES[0]).read_text()))
    validate_config(config)
    assert config["provider"]["type"] == "local"
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
