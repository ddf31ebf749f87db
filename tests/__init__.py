"""Tests mirror the package's folders; what they share is imported as decodelab.tests.…"""
