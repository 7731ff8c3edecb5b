"""A family from an outside package: real stages that compute in microseconds, and that a test can hold or break."""
