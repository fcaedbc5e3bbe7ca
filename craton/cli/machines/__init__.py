"""Verbs about machines: catalog, cluster, doctor, heal, observe."""
