module bifrost.invalid/tools/quadlet

go 1.23.3

tool github.com/containers/podman/v5/cmd/quadlet

require (
	github.com/containers/podman/v5 v5.4.2 // indirect
	github.com/containers/storage v1.57.2 // indirect
	github.com/sirupsen/logrus v1.9.3 // indirect
	golang.org/x/sys v0.29.0 // indirect
)
