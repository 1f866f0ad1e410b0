"""Fleets: which replica serves a request, and what is on its way there. Knows neither SimPy nor devices."""
