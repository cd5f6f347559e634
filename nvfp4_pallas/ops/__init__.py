"""The operations: argument checks, the jnp definition, and the table of who can run it."""
