"""Typed configurations: what is refused, in which words, and what a frozen one is."""

import dataclasses
import json

import numpy as np
import pytest

from yggdrax.experiment import (
    BananaProblem,
    ConfigError,
    ExperimentConfig,
    FunnelProblem,
    GaussianProblem,
    MixtureProblem,
    OptimizerConfig,
    RegressionProblem,
    SvgdConfig,
)


def make(**fields):
    return ExperimentConfig(BananaProblem(), **fields)


def test_unknown_field_is_refused_with_the_closest_name():
    config = make()
    with pytest.raises(ConfigError, match=r"no field 'num_stepz'; did you mean 'num_steps'\?"):
        config.num_stepz = 5
    with pytest.raises(ConfigError, match=r"no field 'qqq'; the fields are bandwidth, kernel"):
        config.svgd.qqq = 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": "many"}, r"num_steps must be int, not str \('many'\)"),
        ({"num_steps": 5.0}, r"num_steps must be int, not float \(5.0\)"),
        ({"num_steps": True}, r"num_steps must be int, not bool \(True\)"),
        ({"plots": 1}, r"plots must be bool, not int \(1\)"),
        ({"svgd": {"bandwidth": 1.0}}, r"svgd must be SvgdConfig, not dict"),
        ({"svgd": SvgdConfig(bandwidth=None)}, r"svgd.bandwidth must be float or str, not None"),
        ({"svgd": SvgdConfig(bandwidth=-1.0)}, r"svgd.bandwidth must be positive and finite"),
        ({"svgd": SvgdConfig(bandwidth=float("nan"))}, r"svgd.bandwidth must be .*not nan"),
        ({"svgd": SvgdConfig(bandwidth="mean")}, r"svgd.bandwidth must be 'median' or a number"),
        ({"svgd": SvgdConfig(kernel="box")}, r"svgd.kernel must be one of rbf, imq, not 'box'"),
        ({"svgd": SvgdConfig(engine="fast")}, r"svgd.engine must be one of auto, exact"),
        ({"svgd": SvgdConfig(per="layer")}, r"svgd.per must be one of particle, leaf, coord"),
        ({"svgd": SvgdConfig(temperature=0.0)}, r"svgd.temperature must be positive"),
        ({"optimizer": OptimizerConfig(name="lion")}, r"optimizer.name must be one of adam"),
        ({"optimizer": OptimizerConfig(schedule="up")}, r"optimizer.schedule must be one of"),
        ({"optimizer": OptimizerConfig(learning_rate=-1)}, r"optimizer.learning_rate must be pos"),
        ({"num_particles": 0}, r"num_particles must be at least 1, not 0"),
        ({"batch_size": -1}, r"batch_size must be at least 0, not -1"),
        ({"checkpoint_every": 0}, r"checkpoint_every must be at least 1, not 0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), not -1"),
        ({"num_steps": 2**31}, r"num_steps must be below 2\*\*31"),
    ],
)
def test_wrong_types_and_values_name_the_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields).freeze()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (BananaProblem(scale=0.0), r"problem.scale must be positive"),
        (BananaProblem(start_scale=-1.0), r"problem.start_scale must be positive"),
        (GaussianProblem(dimension=0), r"problem.dimension must be at least 1"),
        (GaussianProblem(correlation=1.0), r"problem.correlation must be inside \(-1, 1\)"),
        (MixtureProblem(modes=0), r"problem.modes must be at least 1"),
        (FunnelProblem(dimension=1), r"problem.dimension must be at least 2"),
        (RegressionProblem(hidden=0), r"problem.hidden must be at least 1"),
        (RegressionProblem(activation="step"), r"problem.activation must be one of relu, tanh"),
        (RegressionProblem(test_fraction=1.0), r"problem.test_fraction must be inside \(0, 1\)"),
        (RegressionProblem(split_seed=-1), r"problem.split_seed must be at least 0"),
    ],
)
def test_problems_check_their_own_fields(problem, message):
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig(problem).freeze()


def test_a_frozen_configuration_cannot_change_but_its_copy_can():
    config = make(svgd=SvgdConfig(bandwidth=1)).freeze()
    assert type(config.svgd.bandwidth) is float
    with pytest.raises(dataclasses.FrozenInstanceError, match="num_steps"):
        config.num_steps = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.svgd.kernel = "imq"
    copy = config.replace(num_steps=7)
    copy.svgd.kernel = "imq"
    assert (copy.freeze().num_steps, copy.svgd.kernel) == (7, "imq")
    assert (config.num_steps, config.svgd.kernel) == (1000, "rbf")


def test_the_dictionary_is_json_and_tells_problems_apart():
    first, second = (ExperimentConfig(p).to_dict() for p in (BananaProblem(), FunnelProblem()))
    assert json.loads(json.dumps(first)) == first
    assert first["problem"]["kind"] == "BananaProblem"
    assert first["problem"] != second["problem"]


def test_numbers_of_numpy_are_no_python_numbers():
    # np.float64 is a float, np.int64 is no int: what the JSON would lose is refused.
    with pytest.raises(ConfigError, match="num_steps must be int"):
        make(num_steps=np.int64(3)).freeze()
