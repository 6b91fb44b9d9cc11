"""Speed and accuracy of the exact engine and of ensembles, side by side with the alternatives; ``make bench``.

==================  =================================================================================================
``accuracy``        the engine beside plain PyTorch, KeOps and faiss on a CPU, pruned beside dense
``curves``          how cost grows with n, d, B and sigma, on a CPU or a GPU, with the limit drawn in
``ensembles``       linear models and MLPs fitted at once, against a plain loop; the cost of many members
``gpu``, ``unets``  the tables of a GPU
``results``         what was measured, on disk; ``report`` writes ``REPORT.md`` from it
==================  =================================================================================================
"""
