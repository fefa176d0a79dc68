"""Attention back ends behind one interface; a registry of lazy factories."""
