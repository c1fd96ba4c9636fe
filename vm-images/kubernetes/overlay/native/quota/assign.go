//go:build linux && (amd64 || arm64 || riscv64)

package quota

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// batch is the number of directory entries that are read at a time.
const batch = 1024

// Assign puts a directory and everything below it into a project, and makes new files inherit the project. Its users
// may change the tree in the meantime: no symbolic link is followed, and other file systems are left out, as are special
// files and links, which are charged to no project unless they are created in a directory that already belongs to it.
// Files that disappear are no error.
//
// A call that fails or is interrupted can be repeated.
func Assign(directory string, project uint32) error {
	fd, err := open(unix.AT_FDCWD, directory, unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("open %s to put it into project %d: %w", directory, project, err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		unix.Close(fd)
		return fmt.Errorf("read the metadata of %s: %w", directory, err)
	}
	return assignTree(os.NewFile(uintptr(fd), directory), project, stat.Dev)
}

// assignTree assigns a directory before its entries, so that files that are created in the meantime inherit the project.
// It closes the directory.
func assignTree(directory *os.File, project uint32, device uint64) error {
	defer directory.Close()
	if err := assign(int(directory.Fd()), project, inherit); err != nil {
		return fmt.Errorf("put %s into project %d: %w", directory.Name(), project, err)
	}
	for {
		entries, err := directory.ReadDir(batch)
		for _, entry := range entries {
			if !entry.IsDir() && !entry.Type().IsRegular() {
				continue
			}
			if err := assignEntry(directory, entry.Name(), project, device); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return fmt.Errorf("list %s to put it into project %d: %w", directory.Name(), project, err)
		}
	}
}

func assignEntry(directory *os.File, name string, project uint32, device uint64) error {
	path := filepath.Join(directory.Name(), name)
	fd, err := open(int(directory.Fd()), name, 0)
	// ELOOP and ENXIO: the entry has been replaced by a symbolic link or a socket.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s to put it into project %d: %w", path, project, err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		unix.Close(fd)
		return fmt.Errorf("read the metadata of %s: %w", path, err)
	}
	kind := stat.Mode & unix.S_IFMT
	if kind == unix.S_IFDIR && stat.Dev == device {
		return assignTree(os.NewFile(uintptr(fd), path), project, device)
	}
	defer unix.Close(fd)
	if kind != unix.S_IFREG || stat.Dev != device {
		return nil
	}
	if err := assign(fd, project, 0); err != nil {
		return fmt.Errorf("put %s into project %d: %w", path, project, err)
	}
	return nil
}

// assign sets the project of one file, unless the file has it already.
func assign(fd int, project, flags uint32) error {
	var found attributes
	if err := ioctl(fd, getAttributes, &found); err != nil {
		return err
	}
	if found.project == project && found.flags&flags == flags {
		return nil
	}
	found.project = project
	found.flags |= flags
	return ioctl(fd, setAttributes, &found)
}
