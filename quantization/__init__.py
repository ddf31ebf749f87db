"""One file an algorithm, packed formats, calibration, import and export."""
