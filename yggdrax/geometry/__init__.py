"""Where the particles are."""
