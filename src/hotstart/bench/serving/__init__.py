"""``bench serve``: what a server does with many requests, measured from outside."""
