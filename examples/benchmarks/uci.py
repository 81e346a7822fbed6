r"""Bayesian neural networks on small regression tables, against a deep ensemble and ridge.

    python examples/benchmarks/uci.py --data-dir DIR --names concrete energy --splits 20 \
        --out uci.json [--step-factor 10] [--validate] [--only-svgd] [--smoke]

``DIR/NAME.csv`` holds numbers, the target last. Split s permutes the rows by
``numpy.random.RandomState(s).permutation``; the first 90 % are for training. Features and targets
are standardised by the training rows. 20 particles, one hidden layer of 50 ReLU units, batches of
100: the protocol of Liu and Wang (2016), with one setting for all tables. These things differ from
their model, because a posterior must not depend on when one stops:

* The prior of the weights has a fixed scale. Sampled along with the weights, its precision has a
  spike at zero weights, into which particles fall on long runs; integrated out, the highest point
  of the density can still be there.
* The precision of the noise is fixed too, at the value that predicts rows left out of a pilot fit
  best (ten folds, two members a fold, training rows only). SVGD with few particles in hundreds of
  dimensions is narrower than the posterior, so residuals at the particles are too small, and a
  precision sampled along with the weights would be too high.
* The step size falls as (1 + t / 450)^(-2): of all the way it can go, 15 % is left after the usual
  number of steps and 2 % after ten times as many, and the noise of the minibatches dies away. It
  does not know the number of steps, so a longer run begins with the shorter one. (With 1 / t the
  fit went on improving; with t^(-3/2) a third of the way was left, and energy's RMSE fell by 6 %.)
* The run starts from the pilot networks. Its bandwidth is 0.7 times the median rule's: members in
  different modes then mix their gradients less.

The deep ensemble has the same networks, initialisers and optimizer, and as many steps as pilot and
run together; each member maximises its own likelihood, noise precision included.

``--validate`` sets the test rows aside and tests on the last tenth of the training rows instead:
prior and step size were chosen by that, on splits from 100 on (``--first-split 100``). So were
start, bandwidth and the pilot's share of the steps, but once results on the test rows of splits 0
and 1 had been seen. (Test rows of one split are training rows of others.)
"""

import argparse
import concurrent.futures
import functools
import json
import math
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from yggdrax.data import DataError, Standardizer, epoch_order, read_csv
from yggdrax.diagnostics import rmse
from yggdrax.kernels import BandwidthRule, MedianRule
from yggdrax.particles import init_particles, particle_grads
from yggdrax.targets import BayesianNetwork, GaussianNoise, GaussianPrior, Predictive, predict
from yggdrax.transform import svgd

NUM_PARTICLES, HIDDEN, BATCH = 20, 50, 100
STEPS, PILOT_STEPS = 2500, 5000
LEARNING_RATE, DECAY_STEPS = 0.05, 450
PRIOR_SCALE, FOLDS, BANDWIDTH = 4.0, 10, 0.7
METHODS = ("svgd", "deep_ensemble", "single_network", "ridge")


class Split(NamedTuple):
    """One split; everything standardised but ``y_test``."""

    x: np.ndarray  # (rows, features)
    y: np.ndarray  # (rows,)
    x_test: np.ndarray
    y_test: np.ndarray
    scale: np.ndarray  # () of the targets
    shift: np.ndarray  # ()


class Net(nnx.Module):
    """One hidden layer of ReLU units."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        """Two linear layers."""
        self.hidden = nnx.Linear(features, HIDDEN, rngs=rngs)
        self.output = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        """(B, features) to (B, 1)."""
        return self.output(nnx.relu(self.hidden(x)))


def make_split(table, seed: int, validate: bool = False) -> Split:
    """The paired split s of a table; to validate, the test rows are dropped, the rest is split."""
    order = np.random.RandomState(seed).permutation(len(table.y))
    train, test = np.split(order, [int(0.9 * len(order))])
    if validate:
        train, test = np.split(train, [int(0.9 * len(train))])
    features, target = Standardizer.fit(table.x[train]), Standardizer.fit(table.y[train])
    return Split(
        x=features.apply(table.x[train]),
        y=target.apply(table.y[train]),
        x_test=features.apply(table.x[test]),
        y_test=table.y[test].astype(np.float32),
        scale=target.scale.astype(np.float32),
        shift=target.mean.astype(np.float32),
    )


def step_size(t):
    """Of step t."""
    return LEARNING_RATE * (1 + t / DECAY_STEPS) ** -2


def fit(grads, transform, particles, rows: int, key, steps: int):
    """Runs ``steps`` steps; ``grads(particles, row_numbers)`` for minibatches epoch by epoch."""
    batch = min(BATCH, rows)
    per_epoch = rows // batch
    tx = optax.chain(transform, optax.adam(step_size))

    def epoch(carry, number):
        def step(carry, row_numbers):
            particles, state = carry
            updates, state = tx.update(grads(particles, row_numbers), state, particles)
            return (optax.apply_updates(particles, updates), state), None

        return jax.lax.scan(step, carry, epoch_order(key, number, rows, batch))

    epochs = jnp.arange(math.ceil(steps / per_epoch))  # whole epochs: a few steps more
    return jax.lax.scan(epoch, (particles, tx.init(particles)), epochs)[0][0]


def network(features: int, rows: int, likelihood=None) -> BayesianNetwork:
    """The posterior of all methods."""
    prior = GaussianPrior(scale=PRIOR_SCALE)
    return BayesianNetwork(functools.partial(Net, features), likelihood, prior=prior, num_data=rows)


def noise_by_cross_validation(x, y, key, steps: int):
    """The noise precision under which pilot networks predict rows they have not seen best.

    Returns it and the pilot networks.
    """
    rows, features = x.shape
    fold_of_row = np.arange(rows) % FOLDS  # the rows are in random order already
    fold_of_member = np.arange(NUM_PARTICLES) % FOLDS
    kept_rows = rows - math.ceil(rows / FOLDS)
    seen = np.stack([np.flatnonzero(fold_of_row != f)[:kept_rows] for f in fold_of_member])
    seen, unseen = jnp.asarray(seen), jnp.asarray(fold_of_row == fold_of_member[:, None])
    init_key, order_key = jax.random.split(key)
    target = network(features, rows)

    def grads(particles, numbers):
        own = seen[:, numbers]
        return particle_grads(target, particles, (x[own], y[own]), batch_axis=0)

    start = init_particles(init_key, target, NUM_PARTICLES)
    pilot = fit(grads, optax.identity(), start, kept_rows, order_key, steps)
    squares = (predict(target, pilot, x).members[..., 0] - y) ** 2

    def log_likelihood(log_precision):
        density = 0.5 * log_precision - 0.5 * jnp.exp(log_precision) * squares
        return jnp.mean(jax.scipy.special.logsumexp(jnp.where(unseen, density, -jnp.inf), axis=0))

    grid = jnp.linspace(-2.0, 12.0, 281)
    return jnp.exp(grid[jnp.argmax(jax.lax.map(log_likelihood, grid))]), pilot


def bandwidth(particles):
    """A share of the median rule's."""
    leaves = [leaf.reshape(NUM_PARTICLES, -1) for leaf in jax.tree.leaves(particles)]
    return BANDWIDTH * MedianRule().bandwidth(leaves)


def run_svgd(split: Split, key, factor: float) -> Predictive:
    """The posterior by ``chain(svgd, adam)``, from the pilot networks, with their noise."""
    rows, features = split.x.shape
    noise_key, order_key = jax.random.split(key)
    pilot_steps = round(factor * PILOT_STEPS)
    precision, pilot = noise_by_cross_validation(split.x, split.y, noise_key, pilot_steps)
    target = network(features, rows, GaussianNoise(precision=precision))
    start = {"params": pilot["params"]}

    def grads(particles, numbers):
        return particle_grads(target, particles, (split.x[numbers], split.y[numbers]))

    transform, steps = svgd(BandwidthRule(bandwidth)), round(factor * STEPS)
    particles = fit(grads, transform, start, rows, order_key, steps)
    return predict(target, particles, split.x_test)


def run_deep_ensemble(split: Split, key, factor: float) -> Predictive:
    """Independent networks by maximum likelihood."""
    rows, features = split.x.shape
    init_key, order_key = jax.random.split(key)
    target = network(features, rows)

    def loss(particle, batch):
        outputs, _ = target.forward(particle, batch[0])
        return -jnp.mean(target.likelihood.log_prob(particle, outputs, batch[1]))

    def grads(particles, numbers):
        batch = (split.x[numbers], split.y[numbers])
        return jax.vmap(jax.grad(loss), in_axes=(0, None))(particles, batch)

    start = init_particles(init_key, target, NUM_PARTICLES)
    steps = round(factor * (STEPS + PILOT_STEPS))
    particles = fit(grads, optax.identity(), start, rows, order_key, steps)
    return predict(target, particles, split.x_test)


def score(predictive: Predictive, split: Split):
    """Test RMSE and mean log-likelihood in the units of the data."""
    predictive = predictive.rescale(split.scale, split.shift)
    return rmse(predictive.mean[:, 0], split.y_test), jnp.mean(predictive.log_density(split.y_test))


@functools.partial(jax.jit, static_argnames=("factor",))
def svgd_scores(split: Split, key, factor: float):
    """One split of the method ``svgd``, one compiled program."""
    return {"svgd": score(run_svgd(split, key, factor), split)}


@functools.partial(jax.jit, static_argnames=("factor",))
def ensemble_scores(split: Split, key, factor: float):
    """One split of the deep ensemble, and its first member alone."""
    ensemble = run_deep_ensemble(split, key, factor)
    first = jax.tree.map(lambda leaf: leaf[:1], (ensemble.particles, ensemble.members))
    single = Predictive(ensemble.likelihood, *first)
    return {"deep_ensemble": score(ensemble, split), "single_network": score(single, split)}


def ridge_scores(split: Split, key, factor: float):
    """Ridge regression with unit penalty and the residuals' own noise."""
    del key, factor
    x, y = split.x.astype(np.float64), split.y.astype(np.float64)
    weights = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ y)
    noise = float(split.scale) * np.std(y - x @ weights)
    error = split.y_test - (split.x_test @ weights * split.scale + split.shift)
    density = -0.5 * (error / noise) ** 2 - np.log(noise) - 0.5 * np.log(2 * np.pi)
    return {"ridge": (np.sqrt(np.mean(error**2)), np.mean(density))}


def measure(
    table, splits: range, factor: float, validate: bool = False, only_svgd: bool = False
) -> dict[str, dict[str, float]]:
    """All methods on the splits of one table, two splits at a time."""
    results: dict[str, dict[str, float]] = {}
    for function in (svgd_scores, ensemble_scores, ridge_scores)[: 1 if only_svgd else 3]:
        start = time.perf_counter()

        def one(seed, function=function):
            split = make_split(table, seed, validate)
            return jax.device_get(function(split, jax.random.key(seed), factor))

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            scores = list(pool.map(one, splits))
        seconds = time.perf_counter() - start
        for method in scores[0]:
            errors, densities = np.array([entry[method] for entry in scores], np.float64).T
            results[method] = {
                "rmse_mean": float(errors.mean()),
                "rmse_se": _standard_error(errors),
                "log_likelihood_mean": float(densities.mean()),
                "log_likelihood_se": _standard_error(densities),
                "seconds": seconds,
            }
    return results


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def print_table(name: str, results: dict[str, dict[str, float]]) -> None:
    """One line a method."""
    for method in (m for m in METHODS if m in results):
        r = results[method]
        print(
            f"{name:20s} {method:15s} RMSE {r['rmse_mean']:7.3f} +- {r['rmse_se']:.3f}   "
            f"log-likelihood {r['log_likelihood_mean']:7.3f} +- {r['log_likelihood_se']:.3f}   "
            f"{r['seconds']:6.1f} s",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--step-factor", type=float, default=1.0)
    parser.add_argument("--first-split", type=int, default=0)
    parser.add_argument("--validate", action="store_true", help="test on rows held out of training")
    parser.add_argument("--only-svgd", action="store_true", help="leave the other methods out")
    parser.add_argument("--smoke", action="store_true", help="one split, a hundredth of the steps")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.splits, options.step_factor = 1, 0.01 * options.step_factor
    if options.splits < 1 or options.step_factor <= 0 or options.first_split < 0:
        parser.error("--splits and --step-factor must be positive, --first-split not negative")
    try:
        # All of them first: a mistyped name should not come out after hours.
        tables = {name: read_csv(options.data_dir / f"{name}.csv") for name in options.names}
    except (OSError, DataError) as problem:
        parser.error(str(problem))
    print(
        f"{NUM_PARTICLES} networks of {HIDDEN} units, {STEPS * options.step_factor:g} steps of "
        f"{BATCH} rows, {options.splits} splits"
        f"{' of the training rows' if options.validate else ''}; jax {jax.__version__}, "
        f"{jax.default_backend()}"
    )
    splits = range(options.first_split, options.first_split + options.splits)
    results = {}
    for name, table in tables.items():
        results[name] = measure(
            table, splits, options.step_factor, options.validate, options.only_svgd
        )
        print_table(name, results[name])
        options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
