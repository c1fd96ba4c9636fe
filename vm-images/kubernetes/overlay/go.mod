module loopfs.invalid/vm-images/kubernetes/overlay

go 1.26.0
