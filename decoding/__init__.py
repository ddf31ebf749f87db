"""The seams and the loop: draft, acceptance, law, stopping, loop and reference. The model is in decoding/model/."""
