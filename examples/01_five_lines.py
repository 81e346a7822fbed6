"""A whole run in five lines: 200 particles moved onto a banana."""

import jax

import yggdrax as yg

target = yg.Banana()
run = yg.sample(target, jax.random.key(0), num_particles=200, num_steps=500)
yg.check(run.opt_state)
print("mean     ", run.particles.mean(0), "exact", target.mean())
print("variance ", run.particles.var(0), "exact", jax.numpy.diag(target.covariance()))
