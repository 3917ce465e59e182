"""What happens when something goes wrong: the first cause is told, once, and nobody waits for who has gone."""
