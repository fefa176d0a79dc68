"""Building blocks of a forward: linear, normalisation, activation, rotary positions. Imports torch."""
