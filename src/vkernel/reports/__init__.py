"""Reports: a comparison of theory and ensembles, a profile of a training set, an audit of trained networks."""
