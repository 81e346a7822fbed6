"""Particle inference for JAX."""
