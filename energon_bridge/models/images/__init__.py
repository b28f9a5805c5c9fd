"""Images: decoded in the form asked for, resized and cropped, laid out as a model takes them.

It imports the core only. Begin with `images`, which decodes a part (`jpeg` reads headers, `torchcodec_images` is a
second decoder, `visual` converts between PIL, arrays and tensors). `pixels` decides which image processors are computed
natively, `resize` which size an image gets, `resampling` computes it with the bytes of Pillow or torch. `devices`
normalises byte pixels on the GPU, `transforms` are for augmentation, `arrays` and `pickled` decode parts that are
arrays and plain pickles.
"""
