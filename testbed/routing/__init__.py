"""Fleets of replicas: routers, and the dispatch of requests to replicas. Knows neither SimPy nor devices."""
