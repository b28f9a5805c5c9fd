"""Images: decoded in the form asked for, resized and cropped, laid out as a model takes them.

`images` decodes (`jpeg` reads headers), `resampling` resizes with the bytes of Pillow or torch, `pixels` lays out what
models take, `transforms` are for augmentation. `arrays` and `pickled` decode parts that are arrays and plain pickles.
"""
