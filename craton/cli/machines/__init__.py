"""Commands for machines: catalog, cluster, doctor, heal, observe."""
