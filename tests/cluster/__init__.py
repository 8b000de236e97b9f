"""The scenarios of a deployment, against whatever cluster ``KUBECONFIG`` leads to, and against the one on loopback.

``pytest -m cluster tests/cluster`` wants ``KUBECONFIG``, the rights to make namespaces, and ``EVERNEAR_TEST_IMAGE``:
the serving image of this checkout, by digest, where the cluster can pull it. Everything happens in a namespace with a
random name, which is removed in the end. Without the two variables those tests are skipped; the same scenarios on
loopback are part of every test run.
"""
