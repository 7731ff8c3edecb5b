"""`segue bench`: compare Segue with the libraries and other servers, in one run, under the same load. There is a
package or module per workload (`text`, `omni`, `diffusion`, `steps`, `own`, `plain`, `hosts`), shared code in
`harness`, and figures for the documentation from the results in `bench/results`.

Doors: `main`, `harness.hardware`, `harness.process`.
"""
